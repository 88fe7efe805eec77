from structgp.data.layout import GraphLayout, Tuples

__all__ = ["GraphLayout", "Tuples"]
