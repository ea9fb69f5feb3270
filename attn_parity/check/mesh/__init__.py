"""Our variants on meshes of simulated devices: ``attn-bridge check --mesh tensor=2,context=2``."""
