package text_test

import (
	"testing"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/text"
)

func TestMarshal(t *testing.T) {
	bad := "file \xff\xfe name"
	m := &taskv1.TaskFinished{
		TaskId: "good", Message: bad,
		Steps: []*taskv1.StepOutcome{{Error: "fine"}, {Error: bad}},
	}
	if _, err := proto.Marshal(m); err == nil {
		t.Fatal("protobuf takes strings that are not UTF-8: this package is not needed any more")
	}
	b, err := text.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var got taskv1.TaskFinished
	if err := proto.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	const want = "file \uFFFD name"
	if got.GetMessage() != want || got.GetSteps()[1].GetError() != want || got.GetSteps()[0].GetError() != "fine" || got.GetTaskId() != "good" {
		t.Errorf("got %v", &got)
	}
	if m.GetMessage() != bad {
		t.Error("the message of the caller was changed")
	}
}

func TestMarshalList(t *testing.T) {
	b, err := text.Marshal(&taskv1.CommandStep{Argv: []string{"a", "\xff"}})
	if err != nil {
		t.Fatal(err)
	}
	var got taskv1.CommandStep
	if err := proto.Unmarshal(b, &got); err != nil || got.GetArgv()[1] != "\uFFFD" {
		t.Errorf("got %v (%v)", &got, err)
	}
}
