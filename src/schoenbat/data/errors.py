"""What can be wrong with data, told apart from mistakes in a call."""


class DataError(ValueError):
    """A file or a cache does not hold what it should; the message names it and says what to do."""


class MissingDataError(DataError, FileNotFoundError):
    """There is nothing where the data of a task were looked for."""
