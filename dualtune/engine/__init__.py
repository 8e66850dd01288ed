"""The boundary between the loop and a machine: backends, their cards, machines, memory and time by formula."""
