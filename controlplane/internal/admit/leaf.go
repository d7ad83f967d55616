package admit

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"

	"github.com/gpuaas/millwright/pki/envelope"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/rpcerr"
	"github.com/gpuaas/millwright/tasks"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

func decodeLeaf(i int, signed *taskv1.SignedLeaf) (*Leaf, []rpcerr.Violation) {
	leaf, err := envelope.DecodeLeaf(signed.GetLeaf())
	var malformed envelope.Malformed
	switch {
	case errors.As(err, &malformed):
		var bad []rpcerr.Violation
		for _, p := range malformed {
			bad = append(bad, rpcerr.Violation{Field: at(i, p.Field), Value: p.Value, Rule: p.Rule})
		}
		return nil, bad
	case err != nil:
		return nil, []rpcerr.Violation{{Field: fmt.Sprintf("leaves[%d]", i), Rule: err.Error()}}
	}
	return &Leaf{Signed: signed, Leaf: leaf, Hash: envelope.LeafHash(signed.GetLeaf())}, nil
}

// checker collects what is wrong with the tasks of one request.
type checker struct {
	registry *tasks.Registry
	view     store.View
	nodes    map[string]nodeAnswer // by name, so that each is looked up once

	problems []rpcerr.Violation
	reason   string
	code     codes.Code
}

func (c *checker) add(code codes.Code, reason string, v rpcerr.Violation) {
	switch {
	case len(c.problems) == 0:
		c.code, c.reason = code, reason
	case c.reason != reason:
		c.reason = "INVALID"
	}
	if c.code != code {
		c.code = codes.InvalidArgument
	}
	c.problems = append(c.problems, v)
}

func (c *checker) err() error {
	if len(c.problems) == 0 {
		return nil
	}
	out := rpcerr.Invalid(c.reason, c.problems...)
	out.Code = c.code
	return out
}

// leaf checks one task. What it returns is an error of the store.
func (c *checker) leaf(i int, leaf *taskv1.TaskLeaf) error {
	node, err := c.node(leaf.GetNode())
	if err != nil {
		return err
	}
	if node.problem != "" {
		c.add(node.code, node.reason, rpcerr.Violation{Field: at(i, "node"), Value: leaf.GetNode(), Rule: node.problem})
	}
	spec := c.spec(i, leaf)
	if node.row != nil && spec {
		c.supported(i, leaf, node)
	}
	if leaf.GetRetryOf() != "" {
		if _, err := c.view.Task(leaf.GetRetryOf()); errors.Is(err, store.ErrNotFound) {
			c.add(codes.InvalidArgument, "UNKNOWN_TASK", rpcerr.Violation{Field: at(i, "retry_of"), Value: leaf.GetRetryOf(), Rule: "no such task"})
		} else if err != nil {
			return err
		}
	}
	return nil
}

// spec checks kind and spec, and reports whether the kind is known at that revision.
func (c *checker) spec(i int, leaf *taskv1.TaskLeaf) bool {
	kind, err := c.registry.Kind(leaf.GetKind())
	if err != nil {
		var known []string
		for _, k := range c.registry.Kinds() {
			known = append(known, k.Kind)
		}
		c.add(codes.InvalidArgument, "UNKNOWN_KIND", rpcerr.Violation{Field: at(i, "kind"), Value: leaf.GetKind(),
			Rule: fmt.Sprintf("unknown kind; known kinds: %v", known)})
		return false
	}
	spec, err := kind.DecodeSpec(leaf.GetRevision(), leaf.GetSpec())
	if errors.Is(err, tasks.ErrUnknownKind) {
		c.add(codes.InvalidArgument, "UNKNOWN_KIND", rpcerr.Violation{Field: at(i, "revision"), Value: fmt.Sprint(leaf.GetRevision()),
			Rule: fmt.Sprintf("this server knows %s up to revision %d; update it first", kind.Kind, kind.Revision)})
		return false
	}
	if err == nil {
		err = kind.Validate(spec)
	}
	var problems tasks.Problems
	switch {
	case errors.As(err, &problems):
		for _, p := range problems {
			c.add(codes.InvalidArgument, "SPEC_INVALID", rpcerr.Violation{Field: at(i, "spec."+p.Field), Value: clip(p.Value), Rule: p.Rule})
		}
	case err != nil:
		c.add(codes.InvalidArgument, "SPEC_INVALID", rpcerr.Violation{Field: at(i, "spec"), Rule: err.Error()})
	case tasks.CheckSecretDigests(spec, leaf) != nil:
		c.add(codes.InvalidArgument, "SPEC_INVALID", rpcerr.Violation{Field: at(i, "secret_digests"), Rule: tasks.CheckSecretDigests(spec, leaf).Error()})
	case kind.Kind == kindResolve:
		c.resolve(i, leaf, spec)
	}
	return true
}

func (c *checker) supported(i int, leaf *taskv1.TaskLeaf, node nodeAnswer) {
	if len(node.row.GetKinds()) == 0 {
		return // it has not said yet; it will judge for itself
	}
	for _, k := range node.row.GetKinds() {
		if k.GetKind() != leaf.GetKind() {
			continue
		}
		if k.GetRevision() < leaf.GetRevision() {
			c.add(codes.FailedPrecondition, "NODE_LACKS_KIND", rpcerr.Violation{Field: at(i, "revision"), Value: fmt.Sprint(leaf.GetRevision()),
				Rule: fmt.Sprintf("node %s knows %s up to revision %d; update its agent", leaf.GetNode(), k.GetKind(), k.GetRevision())})
		}
		return
	}
	c.add(codes.FailedPrecondition, "NODE_LACKS_KIND", rpcerr.Violation{Field: at(i, "kind"), Value: leaf.GetKind(),
		Rule: fmt.Sprintf("the agent of node %s (version %s) does not have this kind; update it", leaf.GetNode(), node.row.GetAgentVersion())})
}
