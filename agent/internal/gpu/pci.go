package gpu

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// nvidia is the PCI vendor.
const nvidia = "0x10de"

// pciGPUs returns the places of the NVIDIA GPUs on the PCI bus, sorted: display
// controllers of the classes VGA and 3D.
func pciGPUs(sysfs string) ([]string, error) {
	dir := filepath.Join(sysfs, "bus/pci/devices")
	entries, err := os.ReadDir(dir)
	if os.IsNotExist(err) {
		return nil, nil // no PCI bus
	}
	if err != nil {
		return nil, fmt.Errorf("read PCI bus: %w", err)
	}
	var out []string
	for _, e := range entries {
		vendor, err := os.ReadFile(filepath.Join(dir, e.Name(), "vendor"))
		if err != nil || strings.TrimSpace(string(vendor)) != nvidia {
			continue // it was taken out just now, or is not one
		}
		class, err := os.ReadFile(filepath.Join(dir, e.Name(), "class"))
		if err == nil && (strings.HasPrefix(string(class), "0x0300") || strings.HasPrefix(string(class), "0x0302")) {
			out = append(out, e.Name())
		}
	}
	slices.Sort(out)
	return out, nil
}
