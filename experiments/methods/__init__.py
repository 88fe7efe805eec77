"""Methods that exist to be compared with."""
