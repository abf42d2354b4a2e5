"""Checkpoints to and from Hugging Face: the mapping language, a strict reader, import and export.

A family's table (`zoo.bridges.<family>.BRIDGE`) is all that is special to it.
"""

from zoo.bridge.errors import BridgeError
from zoo.bridge.export import export_hf
from zoo.bridge.files.headers import CheckpointError
from zoo.bridge.files.safetensors_io import SafetensorsFolder
from zoo.bridge.files.writer import ExportWriter, Planned, ShardWriter
from zoo.bridge.load import load_hf
from zoo.bridge.mapping.rules import Layout, PaddedRows, Rule, Sections, per_expert_down, per_expert_gate_up, rule
from zoo.bridge.mapping.table import Bridge
from zoo.bridge.mapping.transforms import QKV, Copy, Dims, GatedQKV, GateUp, Rows, Transposed
from zoo.bridge.parallel import Comm, ShardInfo, TorchComm
from zoo.bridge.weight_stream import WeightStream

__all__ = [
    "QKV",
    "Bridge",
    "BridgeError",
    "CheckpointError",
    "Comm",
    "Copy",
    "Dims",
    "ExportWriter",
    "GateUp",
    "GatedQKV",
    "Layout",
    "PaddedRows",
    "Planned",
    "Rows",
    "Rule",
    "SafetensorsFolder",
    "Sections",
    "ShardInfo",
    "ShardWriter",
    "TorchComm",
    "Transposed",
    "WeightStream",
    "export_hf",
    "load_hf",
    "per_expert_down",
    "per_expert_gate_up",
    "rule",
]
