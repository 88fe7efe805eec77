"""People in the loop: a page to label in, and the service behind it, which also serves a fixed model."""
