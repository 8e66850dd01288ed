"""Moving an adapter or an unfinished run from one machine to another, and knowing that nothing changed on the way."""
