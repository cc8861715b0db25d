"""Random cases for every public function: a correct result or a clear error."""
