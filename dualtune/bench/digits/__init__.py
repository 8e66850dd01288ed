"""Predictive training of a small network on real images of digits, beside an ordinary run of equal cost."""

from dualtune.bench.digits.compare import DigitsResult, digits

__all__ = ["DigitsResult", "digits"]
