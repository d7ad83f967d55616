package arch_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
)

// watched are the calls beside which a crash point must stand: writes of a
// journal or store, messages of a session, and changes of the host. The keys are
// directories, the values the names of functions and methods.
var watched = map[string][]string{
	"agent/internal/executor":   {"commit", "update", "putStep", "Apply", "Undo"},
	"agent/internal/session":    {"Send", "Recv", "tell", "Deliver", "Cancel", "Ack"},
	"agent/internal/state":      {"Update", "raiseMark"},
	"agent/internal/output":     {"Send", "Recv", "Sent", "Delete"},
	"agent/internal/enrol":      {"writeFile", "writeJSON", "writeTrust", "writeIdentity", "callJoin", "Renew"},
	"agent/internal/shim":       {"Replace", "Fill", "Rename", "CreateExclusive", "Take", "reserve", "writeResult", "Start", "start", "outcome"},
	"agent/internal/host":       hostChanges,
	"controlplane/internal":     {"Commit", "Send", "Recv", "Put"},
	"agent":                     {"Update", "Condemn"},
	"controlplane/internal/ctl": {},
}

var hostChanges = []string{
	"Unlinkat", "Renameat", "Mkdirat", "Linkat", "Fchmodat", "Symlinkat", "Mount", "Unmount", "writeNew",
	"Remove", "RemoveAll", "Rename", "WriteFile", "Mkdir", "MkdirAll", "MkdirTemp", "Symlink", "Link", "Create", "CreateTemp", "Truncate", "Chmod", "Chown",
	"StartUnitContext", "StopUnitContext", "RestartUnitContext", "ReloadContext", "EnableUnitFilesContext", "DisableUnitFilesContext",
	"StartTransientUnitContext", "KillUnitWithTarget", "ResetFailedUnitContext", "setEnabled",
	"StartTransient", "StopUnit", "stopUnit", "WriteSpec", "Burn", "Probe",
	"CreateExclusive", "Replace", "Fill", "MakeDirs",
}

// pointless are the functions with a watched call and no crash point, and why.
var pointless = map[string]string{
	"agent/internal/enrol.ExtendTrust":   "one atomic write, and a root that was not written comes again with the next Welcome",
	"agent/internal/enrol.replace":       "two atomic writes; a node between them has the certificate that it had",
	"agent/internal/enrol.renew":         "a lost answer is asked for again with the same key; replace writes it",
	"agent/internal/enrol.writeIdentity": "its caller has the points",
	"agent/internal/enrol.writeTrust":    "its caller has the points",
	"agent/internal/enrol.writeJSON":     "its caller has the points",

	"agent/internal/executor.applied":  "the step was verified, and a death before or after the write verifies it again; state.commit is around it",
	"agent/internal/executor.rebooted": "as applied, after a reboot",
	"agent/internal/executor.again":    "state.commit is around it, and its own test restarts and reboots in the back-off",
	"agent/internal/executor.undoHeld": "state.commit is around it, and executor.undo.step follows it",
	"agent/internal/executor.freeze":   "its caller has the points",
	"agent/internal/executor.putStep":  "its callers have the points",
	"agent/internal/executor.commit":   "its callers have the points",
	"agent/internal/executor.suspend":  "a death before the write suspends again at the next boot; state.commit is around it",

	"agent/internal/host.WriteFile":                  "it hands on to files.WriteFile, which has the points",
	"agent/internal/host/containerd.lease":           "a lease that is left is taken over, or expires",
	"agent/internal/host/containerd.clear":           "it removes what has no container; a death leaves it to the next try",
	"agent/internal/host/containerd.clearLost":       "it ends what has no container; a death leaves it to the next try",
	"agent/internal/host/gpus.Change":                "it removes the answer of an earlier change, which nobody reads; its callers have the points",
	"agent/internal/host/gpus.Mark":                  "a name for a unit that was not started names one that does not run; its caller has the points",
	"agent/internal/host/systemd.Reboot":             "executor.step.apply and the reboot itself are around it; tasktest kills on both sides",
	"agent/internal/host/command.Delete":             "its caller, package output, has the points",
	"agent/internal/host/command.stopUnit":           "its caller has the points",
	"agent/internal/host/files.CreateExclusive":      "its callers have the points",
	"agent/internal/host/files.Replace":              "its callers have the points",
	"agent/internal/host/files.Fill":                 "its callers have the points",
	"agent/internal/host/files.Rename":               "its callers have the points",
	"agent/internal/host/files.MakeDirs":             "its callers have the points",
	"agent/internal/host/files.writeNew":             "its callers have the points",
	"agent/internal/host/files.writeOwned":           "its caller has the points",
	"agent/internal/host.RemoveSecret":               "it hands on to secrets.Remove, which has the points",
	"agent/internal/host/files.makeDir":              "its callers have the points",
	"agent/internal/host/systemd.reap":               "it kills what a mount that failed has left; a death leaves it to the next try",
	"agent/internal/host/systemd.resetFailed":        "forgetting a failure changes nothing that a task has",
	"agent/internal/host/systemd.setEnabled":         "its caller has the points",
	"agent/internal/host/systemd.StartTransient":     "its caller, package command, has the points",
	"agent/internal/host/packages.copyFile":          "a copy that is left is made again before the next change",
	"agent/internal/host/packages.deleteCopies":      "a copy that is left is deleted before the next change",
	"agent/internal/host/packages.keep":              "its callers have the points",
	"agent/internal/host/packages.unmark":            "a mark that is left is read by the next change, which does the same",
	"agent/internal/host/packages.removePlaceholder": "an empty file that nothing runs; the next change removes it",
	"agent/internal/host/systemd.RunTransient":       "its caller, package packages, has the points",

	"agent/internal/session.read": "take, open and perform have a point for each message",
	"agent/internal/session.send": "those who hand on a message have a point for each",

	"agent/internal/shim.start":     "its caller has the points",
	"agent/internal/shim.WriteSpec": "its caller, package command, has the points",
	"agent/internal/shim.Take":      "its callers have the points",
	"agent/internal/shim.Burn":      "its caller, package command, has the points",
	"agent/internal/shim.finish":    "its caller has the points",

	"agent/internal/state.Scrub":   "it lowers a doubt; a death before the write leaves the doubt",
	"agent/internal/state.seal":    "a death before the last mark makes the next start look at the whole file: a test of the package",
	"agent/internal/state.Condemn": "state.commit is around it",
	"agent/internal/state.Sweep":   "state.commit is around it, and a sweep that was cut off goes on an hour later",
	"agent/internal/state.rescue":  "it writes a new file for a person to read; one that was not finished is made again",
	"agent/internal/state.migrate": "one transaction; a test of the package opens the copy that is made before it",
	"agent/internal/state.load":    "commit has the points of the mark; here it is raised to what is durable already",
	"agent.Behind":                 "state.commit is around it",
	"agent.keepTime":               "state.commit is around it",
	"agent.ResetClock":             "state.commit is around it",
	"agent.Sent":                   "its caller, package output, has the points",

	"controlplane/internal/dispatch.receive":       "handle has a point for each message",
	"controlplane/internal/dispatch.send":          "sent has a point for each message",
	"controlplane/internal/export.ExportLog":       "it reads for an operator",
	"controlplane/internal/export.Ask":             "it reads for an operator",
	"controlplane/internal/fleet.trimNode":         "the transaction has points, and a death before it leaves what is too old to the next start",
	"controlplane/internal/replay.appendAgain":     "it writes a store that is thrown away",
	"controlplane/internal/rpc/healthv1.begin":     "it reads for an operator",
	"controlplane/internal/rpc/healthv1.tell":      "it reads for an operator",
	"controlplane/internal/rpc/healthv1.changes":   "it reads for an operator",
	"controlplane/internal/rpc/taskv1.one":         "it reads for an operator",
	"controlplane/internal/rpc/taskv1.send":        "it reads for an operator",
	"controlplane/internal/rpc/taskv1.remarks":     "it reads for an operator",
	"controlplane/internal/rpc/taskv1.pass":        "it reads for an operator",
	"controlplane/internal/rpc/taskv1.move":        "it reads for an operator",
	"controlplane/internal/store/boltstore.create": "a store is founded whole or not at all: a test of controlplane",
	"controlplane/internal/store/boltstore.do":     "commit has the points of the transaction",
}

// TestCrashPointsAreRegistered compares the points that are placed with those
// that are declared.
func TestCrashPointsAreRegistered(t *testing.T) {
	for _, side := range []string{"agent", "controlplane"} {
		declared := declaredPoints(t, filepath.Join(root(), side, "internal/crash/points.go"))
		if slices.Sort(declared); len(slices.Compact(slices.Clone(declared))) != len(declared) {
			t.Errorf("%s: a point is declared twice: %v", side, declared)
		}
		literals := map[string]bool{}
		for _, f := range sources(t) {
			if f.test || !within(f.path, side) || within(f.path, side+"/internal/crash") {
				continue
			}
			ast.Inspect(f.ast, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.BasicLit:
					if s, err := strconv.Unquote(n.Value); err == nil {
						literals[s] = true
					}
				case *ast.CallExpr:
					if lit, ok := pointName(n); ok && !slices.Contains(declared, lit) {
						t.Errorf("%s: crash point %q is not declared in %s/internal/crash/points.go", f.at(n), lit, side)
					}
				}
				return true
			})
		}
		for _, name := range declared {
			if !literals[name] {
				t.Errorf("%s: crash point %q is declared and nowhere placed", side, name)
			}
		}
		if len(declared) < 40 {
			t.Errorf("%s: %d points are declared: this test sees too few", side, len(declared))
		}
	}
}

// declaredPoints are the first strings of the entries of the registry.
func declaredPoints(t *testing.T, path string) (names []string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		lit, ok := n.(*ast.CompositeLit)
		if !ok || lit.Type != nil || len(lit.Elts) == 0 {
			return true
		}
		if name, ok := lit.Elts[0].(*ast.BasicLit); ok {
			s, err := strconv.Unquote(name.Value)
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, s)
		}
		return true
	})
	return names
}

// isPoint reports whether n is a call of crash.Point or crash.Fault.
func isPoint(n ast.Node) bool {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return false
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	return ok && isName(sel.X, "crash") && (sel.Sel.Name == "Point" || sel.Sel.Name == "Fault")
}

// pointName is the name of the point that n places, when it is written there.
func pointName(n *ast.CallExpr) (string, bool) {
	if !isPoint(n) || len(n.Args) != 1 {
		return "", false
	}
	lit, ok := n.Args[0].(*ast.BasicLit)
	if !ok {
		return "", false
	}
	s, err := strconv.Unquote(lit.Value)
	return s, err == nil
}

// TestCrashPointsAreEverywhere asks for a crash point in each function that
// writes what must be durable, sends or takes a message, or changes the host.
func TestCrashPointsAreEverywhere(t *testing.T) {
	seen, used := 0, map[string]bool{}
	for _, f := range sources(t) {
		calls := watchedIn(filepath.Dir(f.path))
		if f.test || calls == nil || within(f.path, "agent/internal/crash") || within(f.path, "controlplane/internal/crash") {
			continue
		}
		for _, d := range f.ast.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Body == nil {
				continue
			}
			found, point := lookIn(fn, calls)
			if found == "" {
				continue
			}
			seen++
			key := filepath.Dir(f.path) + "." + fn.Name.Name
			if point {
				continue
			}
			if pointless[key] == "" {
				t.Errorf("%s: %s calls %s and has no crash point: place one and declare it, or say here why not", f.at(fn), key, found)
			}
			used[key] = true
		}
	}
	for key := range pointless {
		if !used[key] {
			t.Errorf("%s needs no exception any more", key)
		}
	}
	if seen < 50 {
		t.Errorf("only %d functions have a watched call: this test sees too little", seen)
	}
}

// lookIn returns a watched call of the function, and whether it has a point.
func lookIn(fn *ast.FuncDecl, calls []string) (found string, point bool) {
	ast.Inspect(fn.Body, func(n ast.Node) bool {
		point = point || isPoint(n)
		if call, ok := n.(*ast.CallExpr); ok && slices.Contains(calls, calledName(call)) {
			found = calledName(call)
		}
		return true
	})
	return found, point
}

// watchedIn are the calls that are watched in a directory: those of the longest
// key above it.
func watchedIn(dir string) []string {
	best, calls := "", []string(nil)
	for key, names := range watched {
		if (dir == key || key != "agent" && within(dir, key)) && len(key) >= len(best) {
			best, calls = key, names
		}
	}
	return calls
}

func calledName(call *ast.CallExpr) string {
	switch fn := call.Fun.(type) {
	case *ast.SelectorExpr:
		return fn.Sel.Name
	case *ast.Ident:
		return fn.Name
	}
	return ""
}
