"""The `diptych` command. Rooms are imported where they are used, so that help is instant."""
