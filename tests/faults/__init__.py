"""What the service does while something around it, or in it, is broken.

Real processes and real faults: a proxy of our own between any two, network namespaces, signals,
full disks, exhausted descriptors. While a fault lasts somebody asks for /health all the time from
outside, and clients go on working; afterwards load is what clients know to be booked, and the index
is what engines hold. A table at the end of the run says what was measured.
"""
