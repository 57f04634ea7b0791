"""The parts of compare.py: what is measured (cases), by whom (adapters), how (timing, memory), and how it is shown."""
