"""What the processes of a mesh run in tests: functions of modules, which a worker can import."""
