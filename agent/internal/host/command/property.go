package command

import (
	sd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"
)

func property(name string, value any) sd.Property {
	return sd.Property{Name: name, Value: dbus.MakeVariant(value)}
}

// execLine is one line of an Exec property, as the bus has it.
type execLine struct {
	Path          string
	Args          []string
	IgnoreFailure bool
}

func execProperty(name string, argv []string) sd.Property {
	return property(name, []execLine{{Path: argv[0], Args: argv}})
}
