package admit

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// kindResolve is the kind by which a person settles a held task.
const kindResolve = "task.resolve"

const (
	nearNames = 5    // names that are suggested
	scanNames = 5000 // names that are compared
)

// nodeAnswer is what is known of a node that a task names.
type nodeAnswer struct {
	row     *serverv1.NodeRow
	code    codes.Code
	reason  string
	problem string
}

func (c *checker) node(name string) (nodeAnswer, error) {
	if a, ok := c.nodes[name]; ok {
		return a, nil
	}
	row, err := c.view.Node(name)
	a := nodeAnswer{row: row}
	switch {
	case errors.Is(err, store.ErrNotFound):
		near, err := near(c.view, name)
		if err != nil {
			return a, err
		}
		a = nodeAnswer{code: codes.NotFound, reason: "UNKNOWN_NODE",
			problem: "no such node" + near + "; make a token for a new one with: millctl node token create " + name}
	case err != nil:
		return a, err
	case row.GetEvicted():
		a = nodeAnswer{code: codes.FailedPrecondition, reason: "NODE_EVICTED",
			problem: "the node was evicted; let it join again with: millctl node token create " + name}
	}
	c.nodes[name] = a
	return a, nil
}

// near names the nodes whose names are most like one that is not known.
func near(v store.NodeView, name string) (string, error) {
	type candidate struct {
		name string
		far  int
	}
	var found []candidate
	for after, seen := "", 0; seen < scanNames; {
		rows, err := v.Nodes(after, 500)
		if err != nil {
			return "", err
		}
		for _, r := range rows {
			if far := distance(name, r.GetName()); far <= max(2, len(name)/3) && !r.GetEvicted() {
				found = append(found, candidate{r.GetName(), far})
			}
		}
		if len(rows) < 500 {
			break
		}
		after, seen = rows[len(rows)-1].GetName(), seen+len(rows)
	}
	if len(found) == 0 {
		return "", nil
	}
	slices.SortStableFunc(found, func(a, b candidate) int { return cmp.Compare(a.far, b.far) })
	var names []string
	for _, f := range found[:min(nearNames, len(found))] {
		names = append(names, f.name)
	}
	return "; did you mean " + strings.Join(names, ", ") + "?", nil
}

// distance is how many letters must be put in, taken out or changed to make b
// of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// resolve checks that a task.resolve names a held task of its own node.
func (c *checker) resolve(i int, leaf *taskv1.TaskLeaf, m proto.Message) {
	spec, ok := m.(*taskv1.ResolveSpec)
	if !ok {
		return
	}
	row, err := c.view.Task(spec.GetTaskId())
	if err != nil {
		c.add(codes.NotFound, "UNKNOWN_TASK", rpcerr.Violation{Field: at(i, "spec.task_id"), Value: spec.GetTaskId(), Rule: "no such task"})
		return
	}
	held := row.GetTask()
	if held.GetNode() != leaf.GetNode() {
		c.add(codes.InvalidArgument, "SPEC_INVALID", rpcerr.Violation{Field: at(i, "node"), Value: leaf.GetNode(),
			Rule: fmt.Sprintf("task %s is on node %s; settle it there", held.GetId(), held.GetNode())})
	}
	if !bytes.Equal(held.GetLeafHash(), spec.GetLeafHash()) {
		c.add(codes.InvalidArgument, "SPEC_INVALID", rpcerr.Violation{Field: at(i, "spec.leaf_hash"),
			Rule: "it is not the hash of the task's leaf; take it from the task"})
	}
	if held.GetState() != taskv1.TaskState_TASK_STATE_HELD {
		c.add(codes.FailedPrecondition, "NOT_HELD", rpcerr.Violation{Field: at(i, "spec.task_id"), Value: held.GetId(),
			Rule: fmt.Sprintf("the task is %s; only a held task can be settled", strings.ToLower(strings.TrimPrefix(held.GetState().String(), "TASK_STATE_")))})
	}
}
