package output

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// line writes 10 MiB without a newline to both streams.
const line = `
$| = 1;
my $rest = join("", map { sprintf("%04x", $_) } 0..16381);
for my $i (0..159) { my $b = sprintf("%08x", $i) . $rest; print STDOUT $b; print STDERR $b }
`

func lineBytes() []byte {
	var rest, b strings.Builder
	for i := range 16382 {
		fmt.Fprintf(&rest, "%04x", i)
	}
	for i := range 160 {
		fmt.Fprintf(&b, "%08x%s", i, rest.String())
	}
	return []byte(b.String())
}

// bytesAll is every byte, and sequences that are no UTF-8.
const bytesAll = `binmode STDOUT; binmode STDERR; print pack("C*", 0..255), "\xc3\x28\xff"; print STDERR "\xed\xa0\x80\x00\xfe"; exit 0`

// other is a command that runs beside the flood.
type other struct {
	name string
	argv []string
	want []expected
	id   string
}

func startOthers(c *clustertest.Cluster) []*other {
	var all strings.Builder
	for i := range 256 {
		all.WriteByte(byte(i))
	}
	const keep = `printf begun; setsid sleep 601 & printf over`
	const keepOne = `printf begun; setsid sleep 601 2>/dev/null & printf over`
	others := []*other{
		{name: "a line of 10 MiB", argv: []string{"/usr/bin/perl", "-e", line},
			want: []expected{{stream: stdout, all: lineBytes()}, {stream: stderr, all: lineBytes()}}},
		{name: "all bytes, and no UTF-8", argv: []string{"/usr/bin/perl", "-e", bytesAll},
			want: []expected{{stream: stdout, all: []byte(all.String() + "\xc3\x28\xff")}, {stream: stderr, all: []byte("\xed\xa0\x80\x00\xfe")}}},
		{name: "a grandchild keeps the pipes", argv: []string{"/bin/sh", "-c", keep},
			want: []expected{{stream: stdout, all: []byte("begunover"), open: true}, {stream: stderr, open: true}}},
		{name: "a grandchild keeps one pipe", argv: []string{"/bin/sh", "-c", keepOne},
			want: []expected{{stream: stdout, all: []byte("begunover"), open: true}, {stream: stderr}}},
		{name: "nothing", argv: []string{"/bin/true"}, want: []expected{{stream: stdout}, {stream: stderr}}},
	}
	for _, o := range others {
		o.id = c.Start("system.command", "n1", command(o.argv...))
	}
	return others
}

func (o *other) check(t *testing.T, c *clustertest.Cluster) {
	c = c.With(t)
	if task := c.End(o.id); task.GetState() != succeeded {
		t.Fatalf("state %s: %s %s", task.GetState(), task.GetReason(), task.GetMessage())
	}
	for _, e := range o.want {
		e.checkLogs(t, c, o.id)
	}
	task := c.End(o.id)
	for _, e := range o.want {
		e.checkTask(t, task)
	}
	if left := c.Sh("n1", "pgrep -f 'sleep 60[1]' || true"); left != "" {
		t.Errorf("processes %s are left", left)
	}
}

// endless is a grandchild that does not stop writing. How much comes of it is
// not known before, but all else is.
func endless(t *testing.T, c *clustertest.Cluster) {
	const line = "0123456789abcde\n"
	const talk = `printf begun; setsid perl -e '$| = 1; for (;;) { print "0123456789abcde\n" x 4096; select(undef, undef, undef, 0.02) }' &`
	task := c.Do("system.command", "n1", command("/bin/sh", "-c", talk))
	if task.GetState() != succeeded {
		t.Fatalf("state %s: %s %s", task.GetState(), task.GetReason(), task.GetMessage())
	}
	total := int(task.GetSteps()[0].GetCommand().GetStdout().GetTotalBytes())
	if total < headLimit+tailLimit || total > 200*mib {
		t.Fatalf("%d bytes came, which is no good for this test", total)
	}
	e := expected{stream: stdout, all: []byte("begun" + strings.Repeat(line, total/len(line)+1))[:total], open: true}
	e.checkLogs(t, c, task.GetId())
	e.checkTask(t, c.End(task.GetId()))
	if left := c.Sh("n1", "pgrep -f 012345678[9]abcde || true"); left != "" {
		t.Errorf("processes %s are left", left)
	}
}
