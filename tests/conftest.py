"""Shapes that credit and objective promise in their signatures are checked at every call of every test."""

import sys
from types import ModuleType

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

# The hook takes a checker by name, and none that exists lets an int pass for a float, as Python does.
checker = ModuleType("headwater_shapes")
checker.__dict__["check"] = beartype(conf=BeartypeConf(is_pep484_tower=True))
sys.modules[checker.__name__] = checker
install_import_hook(["headwater.credit", "headwater.objective"], "headwater_shapes.check")
