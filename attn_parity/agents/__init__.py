"""The judge for agents: tools of an MCP server, each call in a confined process, each answer under 2 kB.

`calls` checks arguments and runs commands, `answers` makes short texts of reports, and `server` offers both by the
Model Context Protocol (extra ``mcp``).
"""
