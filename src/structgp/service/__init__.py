"""The labelling page and the service behind it, which can also serve a fixed model."""
