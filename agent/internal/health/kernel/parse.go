package kernel

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Kind is what a driver said.
type Kind uint8

// What the drivers say that matters here.
const (
	// XID is an error report of a GPU's driver, by number.
	XID Kind = iota + 1
	// SXID is an error report of an NVSwitch's driver, by number.
	SXID
	// OffBus is a GPU that does not answer any more. It comes with XID 79, or
	// without a number.
	OffBus
	// LinkDetect is an NVLink that did not come up after a reset.
	LinkDetect
)

// Report is one thing that a driver said.
type Report struct {
	Kind   Kind
	PCI    string // domain:bus:device, lower case, four digits of domain at least; unset for LinkDetect
	Number int    // of an XID or SXID
	// Unit, Fatal and Link are given by the lines of NVLink 5 (XID 144 to 150)
	// and of NVSwitches; Unit also by those of XID 13, as "GPC 1, TPC 2".
	Unit  string
	Fatal Verdict
	Link  int // -1: none is named
	// Recovery is the action that XID 154 names, by the numbers of
	// NVML_GPU_RECOVERY_ACTION; -1: none.
	Recovery int
	// Process is the process that the driver names, if any.
	Process string
	Detail  string // the rest of the line, at most 200 bytes
}

// Verdict is the line's own word on how bad it is.
type Verdict uint8

// The verdicts of a line.
const (
	Unsaid Verdict = iota
	NonFatal
	Fatal
)

// maxDetail bounds what is kept of a line for people.
const maxDetail = 200

// The forms are anchored at the start of a line: the kernel repeats names that
// users choose, of processes and of devices, and none of these may look like a
// report. The forms are held by TestForms.
var (
	xidLine    = regexp.MustCompile(`^NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?(?: GPU-I:[0-9a-fA-F]+)?\): ([0-9]{1,4})(?:,|$)\s*(.*)$`)
	sxidLine   = regexp.MustCompile(`^nvidia-nvswitch[0-9]{1,3}: SXid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?\): ([0-9]{1,6})(?:,|$)\s*(.*)$`)
	gpuOffBus  = regexp.MustCompile(`^NVRM: GPU (?:at )?(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?: GPU has fallen off the bus\.?\s*$`)
	longOffBus = regexp.MustCompile(`^NVRM: The NVIDIA GPU ([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?(?:\s|$)`)
	linkDetect = regexp.MustCompile(`^NVRM: knvlinkUpdatePostRxDetectLinkMask_[A-Z0-9]+: Failed to update Rx Detect Link mask!`)
	link5      = regexp.MustCompile(`^([A-Z][A-Z0-9_]*)\s+(Nonfatal|Fatal)\s+(XC[0-9]+)\s+(i[0-9]+)\s+Link\s+(-?[0-9]{1,3})\s`)
	switchLink = regexp.MustCompile(`^(Non-fatal|Fatal), (?:Link ([0-9]{1,3}) )?`)
	recovery   = regexp.MustCompile(`(?i)recovery action changed from 0x[0-9a-f]{1,4} \([^)]*\) to 0x([0-9a-f]{1,4})\b`)
	// The name of a process has 15 bytes, and cannot hold these words.
	exception = regexp.MustCompile(`Exception on \((GPC [0-9]{1,2}, TPC [0-9]{1,2})[,)]`)
	process   = regexp.MustCompile(`pid='?([0-9]{1,10})'?(?:, name=([^,\s]{1,64}))?`)
)

const offBusTail = "fallen off the bus and is not responding to commands"

// Parser finds the reports in a stream of records. The zero value is ready. It
// is not safe for concurrent use.
type Parser struct {
	// pending is the GPU of a report that takes several records.
	pending string
	left    int
}

// Parse returns what the record reports. A record that the kernel did not print
// itself reports nothing.
func (p *Parser) Parse(r Record) []Report {
	if r.Facility != 0 {
		return nil
	}
	var out []Report
	for i, line := range strings.Split(r.Text, "\n") {
		// Later lines of one record may hold what a user chose, with a line feed in
		// it; only the driver's own continuation is looked for there.
		if i > 0 && p.pending == "" {
			break
		}
		if rep, ok := p.line(line); ok {
			out = append(out, rep)
		}
	}
	return out
}

func (p *Parser) line(s string) (Report, bool) {
	if p.pending != "" {
		if rep, done, ok := p.goOn(s); done {
			return rep, ok
		}
	}
	if !strings.HasPrefix(s, "NV") && !strings.HasPrefix(s, "nvidia-nvswitch") {
		return Report{}, false
	}
	if m := xidLine.FindStringSubmatch(s); m != nil {
		return xid(m)
	}
	if m := sxidLine.FindStringSubmatch(s); m != nil {
		return sxid(m)
	}
	if m := gpuOffBus.FindStringSubmatch(s); m != nil {
		return offBus(m[1]), true
	}
	if m := longOffBus.FindStringSubmatch(s); m != nil {
		if strings.Contains(s, offBusTail) {
			return offBus(m[1]), true
		}
		p.pending, p.left = m[1], 3
		return Report{}, false
	}
	if linkDetect.MatchString(s) {
		return Report{Kind: LinkDetect, Link: -1, Recovery: -1, Detail: cut(s)}, true
	}
	return Report{}, false
}

// goOn reads the lines after "The NVIDIA GPU ...": the driver prints its words
// over three lines. done says that the line belonged to it or ended it.
func (p *Parser) goOn(s string) (rep Report, done, ok bool) {
	if !strings.HasPrefix(s, "NVRM: ") || p.left == 0 {
		p.pending = ""
		return Report{}, false, false
	}
	p.left--
	if strings.Contains(s, offBusTail) {
		pci := p.pending
		p.pending = ""
		return offBus(pci), true, true
	}
	if xidLine.MatchString(s) || gpuOffBus.MatchString(s) || longOffBus.MatchString(s) {
		p.pending = ""
		return Report{}, false, false
	}
	return Report{}, true, false
}

func offBus(pci string) Report {
	return Report{
		Kind: OffBus, PCI: NormalPCI(pci), Link: -1, Recovery: -1, Fatal: Fatal,
		Detail: "GPU has fallen off the bus",
	}
}

func xid(m []string) (Report, bool) {
	n, err := strconv.Atoi(m[2])
	if err != nil || n == 0 {
		return Report{}, false
	}
	r := Report{Kind: XID, PCI: NormalPCI(m[1]), Number: n, Link: -1, Recovery: -1, Detail: cut(m[3])}
	if l := link5.FindStringSubmatch(m[3]); l != nil {
		r.Unit, r.Fatal = l[1], NonFatal
		if l[2] == "Fatal" {
			r.Fatal = Fatal
		}
		if k, err := strconv.Atoi(l[5]); err == nil && k >= 0 {
			r.Link = k
		}
	}
	if a := recovery.FindStringSubmatch(m[3]); n == 154 && a != nil {
		if v, err := strconv.ParseUint(a[1], 16, 16); err == nil {
			r.Recovery = int(v)
		}
	}
	if u := exception.FindStringSubmatch(m[3]); n == 13 && u != nil {
		r.Unit = u[1]
	}
	if a := process.FindStringSubmatch(m[3]); a != nil {
		r.Process = strings.Trim(a[1]+" "+a[2], " ")
	}
	return r, true
}

func sxid(m []string) (Report, bool) {
	n, err := strconv.Atoi(m[2])
	if err != nil || n == 0 {
		return Report{}, false
	}
	r := Report{Kind: SXID, PCI: NormalPCI(m[1]), Number: n, Link: -1, Recovery: -1, Detail: cut(m[3])}
	if l := switchLink.FindStringSubmatch(m[3]); l != nil {
		r.Fatal = NonFatal
		if l[1] == "Fatal" {
			r.Fatal = Fatal
		}
		if k, err := strconv.Atoi(l[2]); err == nil {
			r.Link = k
		}
	}
	return r, true
}

// NormalPCI gives a PCI address in the one form that is used here:
// domain:bus:device in lower case, the domain with four digits or, when it is
// larger, as many as it takes. The kernel's log, NVML and sysfs each write it
// differently.
func NormalPCI(s string) string {
	s = strings.ToLower(strings.TrimPrefix(s, "PCI:"))
	s, _, _ = strings.Cut(s, ".")
	domain, rest, ok := strings.Cut(s, ":")
	if !ok {
		return s
	}
	if n, err := strconv.ParseUint(domain, 16, 32); err == nil && len(domain) > 4 {
		domain = fmt.Sprintf("%04x", n)
	}
	return domain + ":" + rest
}

// cut keeps the first bytes of a text, without what cannot be printed.
func cut(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '�' {
			return -1
		}
		return r
	}, s)
	if len(s) <= maxDetail {
		return s
	}
	s = s[:maxDetail]
	for len(s) > 0 && s[len(s)-1] >= 0x80 { // not in the middle of a character
		s = s[:len(s)-1]
	}
	return s
}
