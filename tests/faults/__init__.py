"""Faults on purpose: whole runs that are killed, starved of disk, or lose a host, and must not notice."""
