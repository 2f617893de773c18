"""What goes wrong with data files; apart, so that light modules need not import the heavy ones."""


class DataError(ValueError):
    """Data cannot be used; the message names the file, the row and the next step."""
