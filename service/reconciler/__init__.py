"""Makes what users wished for so: starts, watches, retries and ends attempts."""

from service.reconciler.actions import Timing
from service.reconciler.reconciler import Reconciler

__all__ = ["Reconciler", "Timing"]
