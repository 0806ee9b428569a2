"""Jobs that live and are no hang, each with a twin that is one."""
