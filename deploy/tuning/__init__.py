"""Measures and fits parameters of serving: the rates of the cost model, and the rules by which a sparse residency
policy selects keys for attention."""
