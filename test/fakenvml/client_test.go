package fakenvml_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuaas/millwright/test/fakenvml"
)

// A process has one NVML library and one node, so a client is this test binary,
// started again: it answers questions that come as lines of JSON.
const clientVariable = "FAKENVML_TEST_CLIENT"

func TestMain(m *testing.M) {
	if os.Getenv(clientVariable) != "" {
		serveClient()
		return
	}
	os.Exit(m.Run())
}

type question struct {
	Op   string
	GPU  int
	Args []uint32
	Text string
}

type reply struct {
	Ret     int
	Numbers []int64
	Text    string
}

func serveClient() {
	in := bufio.NewScanner(os.Stdin)
	out := json.NewEncoder(os.Stdout)
	c := &served{}
	for in.Scan() {
		var q question
		if err := json.Unmarshal(in.Bytes(), &q); err != nil {
			panic(err)
		}
		if err := out.Encode(c.answer(q)); err != nil {
			panic(err)
		}
	}
}

type served struct {
	set nvml.EventSet
}

func code(r nvml.Return, numbers ...int64) reply { return reply{Ret: int(r), Numbers: numbers} }

func (c *served) answer(q question) reply {
	switch q.Op {
	case "init":
		return code(nvml.Init())
	case "shutdown":
		return code(nvml.Shutdown())
	case "count":
		n, r := nvml.DeviceGetCount()
		return code(r, int64(n))
	case "symbol":
		if nvml.Extensions().LookupSymbol(q.Text) != nil {
			return code(nvml.ERROR_FUNCTION_NOT_FOUND)
		}
		return code(nvml.SUCCESS)
	case "wait":
		e, r := c.set.Wait(q.Args[0])
		if r != nvml.SUCCESS {
			return code(r)
		}
		index, _ := e.Device.GetIndex()
		return code(r, int64(index), int64(e.EventType), int64(e.EventData))
	}
	d, r := nvml.DeviceGetHandleByIndex(q.GPU)
	if r != nvml.SUCCESS {
		return code(r)
	}
	return c.device(q, d)
}

func (c *served) device(q question, d nvml.Device) reply {
	switch q.Op {
	case "open":
		return code(nvml.SUCCESS)
	case "uuid":
		u, r := d.GetUUID()
		return reply{Ret: int(r), Text: u}
	case "temperature":
		t, r := d.GetTemperature(nvml.TEMPERATURE_GPU)
		return code(r, int64(t))
	case "remapped":
		corr, unc, pending, failed, r := d.GetRemappedRows()
		return code(r, int64(corr), int64(unc), truth(pending), truth(failed))
	case "field":
		v := []nvml.FieldValue{{FieldId: q.Args[0]}}
		if r := d.GetFieldValues(v); r != nvml.SUCCESS {
			return code(r)
		}
		return reply{Ret: int(v[0].NvmlReturn), Numbers: []int64{int64(v[0].Value[0])}}
	case "register":
		if c.set == nil {
			s, r := nvml.EventSetCreate()
			if r != nvml.SUCCESS {
				return code(r)
			}
			c.set = s
		}
		return code(d.RegisterEvents(uint64(q.Args[0]), c.set))
	case "mig":
		current, pending, r := d.GetMigMode()
		return code(r, int64(current), int64(pending))
	case "set-mig":
		activation, r := d.SetMigMode(int(q.Args[0]))
		return code(r, int64(activation))
	}
	if q.Op == "explore" {
		return exploreLayouts(d)
	}
	return migQuestion(q, d)
}

func truth(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// client is the asking side.
type client struct {
	t   *testing.T
	cmd *exec.Cmd
	in  *json.Encoder
	out *json.Decoder
}

// startClient starts a client that has not initialized the library yet.
func startClient(t *testing.T, n *fakenvml.Node, env ...string) *client {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(append(os.Environ(), clientVariable+"=1"), append(n.Env(), env...)...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &client{t: t, cmd: cmd, in: json.NewEncoder(in), out: json.NewDecoder(out)}
	t.Cleanup(c.kill)
	return c
}

func (c *client) try(op string, gpu int, args ...uint32) (reply, error) {
	var r reply
	if err := c.in.Encode(question{Op: op, GPU: gpu, Args: args}); err != nil {
		return r, err
	}
	return r, c.out.Decode(&r)
}

func (c *client) ask(op string, gpu int, args ...uint32) reply {
	c.t.Helper()
	r, err := c.try(op, gpu, args...)
	if err != nil {
		c.t.Fatalf("%s of GPU %d: %v", op, gpu, err)
	}
	return r
}

// want asks and holds the answer against a code and numbers.
func (c *client) want(op string, gpu int, args []uint32, ret nvml.Return, numbers ...int64) {
	c.t.Helper()
	got := c.ask(op, gpu, args...)
	if got.Ret != int(ret) || (ret == nvml.SUCCESS && fmt.Sprint(got.Numbers) != fmt.Sprint(numbers)) {
		c.t.Errorf("%s%v of GPU %d = %d %v, want %d %v", op, args, gpu, got.Ret, got.Numbers, ret, numbers)
	}
}

func (c *client) kill() {
	if c.cmd.ProcessState == nil {
		c.cmd.Process.Kill() //nolint:errcheck // it may have ended by itself
		c.cmd.Wait()         //nolint:errcheck // it was killed
	}
}

func newNode(t *testing.T, products ...string) *fakenvml.Node {
	t.Helper()
	return newVariant(t, fakenvml.Variant{}, products...)
}

func newVariant(t *testing.T, v fakenvml.Variant, products ...string) *fakenvml.Node {
	t.Helper()
	lib, err := fakenvml.Build(t.Context(), v)
	if err != nil {
		t.Fatal(err)
	}
	n, err := lib.NewNode(t.Context(), filepath.Join(t.TempDir(), "state"), products...)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
