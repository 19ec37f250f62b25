"""What plugins see: hooks, the classes that they subclass, the catalog of what they offer, events and failures."""
