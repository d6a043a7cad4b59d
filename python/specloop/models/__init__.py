"""Target models. ``base`` says what the decode loop needs of one."""
