"""A model with its adapter for other programs: merged, converted, quantized by their own tools, and compared."""
