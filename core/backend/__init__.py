"""What a backend is: the contract, the table of kernels, and two base classes that make a backend of such a table."""

from .addressed import AddressedTarget, Context
from .contract import API, Backend, Capabilities, Device, Executable, Memory, Storage, Support, Target
from .kernels import KernelTable, body_kernel
from .managed import ManagedTarget
from .memory import HostMemory
from .strict import conditions
from .trace import Look, Watch, Watcher, observe

__all__ = [
    "API",
    "AddressedTarget",
    "Backend",
    "Capabilities",
    "Context",
    "Device",
    "Executable",
    "HostMemory",
    "KernelTable",
    "Look",
    "ManagedTarget",
    "Memory",
    "Storage",
    "Support",
    "Target",
    "Watch",
    "Watcher",
    "body_kernel",
    "conditions",
    "observe",
]
