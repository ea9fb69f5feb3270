"""Reviews, attestations and the server for agents, without a framework."""
