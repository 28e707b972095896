"""Counting: the catalogue of series, the ledger that folds facts into books, and exporters."""

from kvtiers.metrics.ledger import Ledger

__all__ = ["Ledger"]
