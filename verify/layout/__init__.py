"""Page formats, read from the definition of each byte."""
