"""Methods that the library is compared with."""
