"""One name for the implementation, the submodule that an attention module carries, and the config's entry."""

NAME = "schoenbat"
