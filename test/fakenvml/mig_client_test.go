package fakenvml_test

import "github.com/NVIDIA/go-nvml/pkg/nvml"

func migQuestion(q question, d nvml.Device) reply {
	return reply{Ret: -1, Text: "unknown question " + q.Op}
}
