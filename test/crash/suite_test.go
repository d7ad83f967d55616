package main

import (
	"slices"
	"testing"
)

// The cases of a story with a server of its own are left out where another story
// comes by the same point, but for those that it is there for.
func TestSpare(t *testing.T) {
	made := func(title string, own bool, strikes, at string) job {
		return job{story{kind: title, own: own, strikes: strikes}, injury{point{Name: at, Program: server}, 1, "kill"}}
	}
	var got []string
	for _, j := range spare([]job{
		made("kind", false, "", "server.assign.sent"),
		made("(a)", true, "", "server.assign.sent"), made("(a)", true, "", "server.token.before"),
		made("(b)", true, "", "server.token.before"),
		made("(c)", true, "server.secret.", "server.secret.kept"), made("(c)", true, "server.secret.", "server.assign.sent"),
		made("(d)", true, "server.secret.", "server.secret.kept"),
	}) {
		got = append(got, j.story.kind+" "+j.injury.point.Name)
	}
	want := []string{"kind server.assign.sent", "(a) server.token.before", "(c) server.secret.kept", "(d) server.secret.kept"}
	if !slices.Equal(got, want) {
		t.Errorf("what is left is %v, want %v", got, want)
	}
}
