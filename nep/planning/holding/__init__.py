"""Who holds what: lanes, cuts, owners and mirrors."""
