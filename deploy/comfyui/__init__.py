"""Nodes of ComfyUI that have Giornata edit pictures. ComfyUI loads this folder from its `custom_nodes`."""

from __future__ import annotations

from . import nodes

NODE_CLASS_MAPPINGS = nodes.NODE_CLASS_MAPPINGS
NODE_DISPLAY_NAME_MAPPINGS = nodes.NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
