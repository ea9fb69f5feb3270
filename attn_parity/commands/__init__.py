"""The commands of the judge; `attn_bridge.cli` loads them by name."""
