"""Sources of live prices, one module each, behind the ``PriceSource`` interface."""
