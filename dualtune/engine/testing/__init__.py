"""For authors of backends: a conformance suite, independent oracles, and a small complete engine in NumPy."""
