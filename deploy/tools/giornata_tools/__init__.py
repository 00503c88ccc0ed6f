"""The tools around Giornata's services: the program ``giornata`` and what it runs.

* :mod:`giornata_tools.cli` - the commands
* :mod:`giornata_tools.clients` - ways to a system: by HTTP and by NATS
* :mod:`giornata_tools.launcher` - the whole system on one machine
* :mod:`giornata_tools.lora_profiler` - how late LoRAs may join, seen in pictures

What measures, trains and judges is `giornata_lab`, whose commands are part of the program where it is installed.
"""
