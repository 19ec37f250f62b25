"""What CUDA families and the backends of that language share: the device library, and the text that is written around it.

No plugin: nothing here is offered to the core. Families import ``make_source`` and the functors, backends ``include_dir``.
"""

from .arguments import operand_pointer
from .controls import control
from .device_library import digest, include_dir
from .functors import CUDA, elementwise_struct, epilogue_struct, literal
from .lengths import known_length
from .limits import check_launches
from .needs import block_needs
from .render import c_type, entries_of, make_source, plan_struct

__version__ = "0.1.0"
__all__ = [
    "CUDA", "block_needs", "c_type", "check_launches", "control", "digest", "elementwise_struct", "entries_of", "epilogue_struct",
    "include_dir", "known_length", "literal", "make_source", "operand_pointer", "plan_struct",
]
