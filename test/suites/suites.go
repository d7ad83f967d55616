package main

import "time"

// required is what `make test` must show. It only grows.
var required = []suite{
	{
		name: "arch", about: "import rules, sizes, names and comments",
		packages: []string{"./test/arch/..."}, timeout: 5 * time.Minute,
	},
	{
		name: "unit", about: "every package by itself, with race detection where it matters",
		packages: []string{"./...", "-test"}, timeout: 15 * time.Minute,
	},
}
