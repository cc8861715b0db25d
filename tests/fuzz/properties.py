"""All properties, by importing the modules that hold them."""

from fuzz import attention, maps, mistakes, modules, packed, texts  # noqa: F401
from fuzz.harness import PROPERTIES  # noqa: F401
