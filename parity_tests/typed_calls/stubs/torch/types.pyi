from . import device

Device = device | str | int | None
