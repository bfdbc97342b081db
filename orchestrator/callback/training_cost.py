"""Dollars of a training, and the rest of its budget."""

from dataclasses import dataclass

from gpu_catalog.catalog import load_catalog
from gpu_catalog.number_text import dollars, given


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Price and budget of a training.

    Attributes:
        usd_per_hour: price of the machine; None for that of the GPU's cheapest offer, where there
            is a budget.
        budget_usd: dollars to spend; None for no budget.
    """

    usd_per_hour: float | None
    budget_usd: float | None

    def price(self, gpu_key: str) -> float | None:
        """Dollars per hour; None where neither a price nor a budget is given, or no offer."""
        if self.usd_per_hour is not None or self.budget_usd is None:
            return self.usd_per_hour
        offers = load_catalog().offers(gpu_key)
        return min((offer.usd_per_hour for offer in offers), default=None)

    def left_usd(self, hours: float, gpu_key: str) -> float | None:
        """Rest of the budget after so many hours, negative where it is exceeded."""
        price = self.price(gpu_key)
        if price is None or self.budget_usd is None:
            return None
        return self.budget_usd - price * hours

    def text(self, hours: float, gpu_key: str) -> str:
        """Dollars of so many hours, and what is left of the budget; empty without a price."""
        price, left = self.price(gpu_key), self.left_usd(hours, gpu_key)
        if price is None:
            return ""
        text = f", ${dollars(price * hours)} in all at ${dollars(price)}/h"
        if left is None:
            return text
        if left < 0:
            return (
                f"{text}: WARNING: the budget of ${given(self.budget_usd)} lacks ${dollars(-left)}"
            )
        return f"{text}; ${dollars(left)} of ${given(self.budget_usd)} are left"
