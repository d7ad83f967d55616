package intercept

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc"
	healthgrpc "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/gpuaas/millwright/pki"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	healthv1 "github.com/gpuaas/millwright/proto/millwright/health/v1"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// Class is a group of RPCs that share a caller's limit.
type Class string

// The classes.
const (
	// ClassSession is for opening a node's streams.
	ClassSession Class = "session"
	// ClassJoin is for callers that have no identity, by address.
	ClassJoin Class = "join"
	// ClassRead is for reading.
	ClassRead Class = "read"
	// ClassWrite is for changing.
	ClassWrite Class = "write"
	// ClassWatch is for opening streams that follow something.
	ClassWatch Class = "watch"
)

// Audit says what is recorded of the calls that are allowed. Denied calls are
// always recorded, coalesced.
type Audit int

// The audit decisions.
const (
	// AuditNone records nothing: what the call does is recorded by itself.
	AuditNone Audit = iota + 1
	// AuditCoalesced records the calls of one caller once a minute.
	AuditCoalesced
	// AuditEach records every call.
	AuditEach
)

// Row is the policy of one RPC.
type Row struct {
	// Roles may call it.
	Roles []pki.Role
	// Anonymous says that a caller without a certificate may.
	Anonymous bool
	// Class is whose limit it counts against.
	Class Class
	// Audit is what is recorded of it.
	Audit Audit
}

// Policy is the table, by the full name of the method.
type Policy map[string]Row

// Default is the policy of millwright-server. A test compares it with the
// services' descriptors, so that a new RPC without a row cannot be built.
func Default() Policy {
	var (
		nodes     = []pki.Role{pki.RoleNode}
		operators = []pki.Role{pki.RoleOperator}
		clients   = []pki.Role{pki.RoleOperator, pki.RoleController}
	)
	return Policy{
		agentv1.AgentService_Session_FullMethodName:      {Roles: nodes, Class: ClassSession, Audit: AuditCoalesced},
		agentv1.AgentService_UploadOutput_FullMethodName: {Roles: nodes, Class: ClassSession, Audit: AuditNone},
		agentv1.AgentService_FetchSecret_FullMethodName:  {Roles: nodes, Class: ClassWrite, Audit: AuditEach},

		secretv1.SecretService_PutSecret_FullMethodName:    {Roles: operators, Class: ClassWrite, Audit: AuditEach},
		secretv1.SecretService_ListSecrets_FullMethodName:  {Roles: clients, Class: ClassRead, Audit: AuditCoalesced},
		secretv1.SecretService_RemoveSecret_FullMethodName: {Roles: operators, Class: ClassWrite, Audit: AuditEach},

		agentv1.EnrolmentService_Join_FullMethodName:  {Anonymous: true, Class: ClassJoin, Audit: AuditEach},
		agentv1.EnrolmentService_Renew_FullMethodName: {Roles: nodes, Class: ClassWrite, Audit: AuditEach},
		// An ended certificate opens no door; it is shown to these two.
		agentv1.EnrolmentService_StartRekey_FullMethodName: {Anonymous: true, Class: ClassJoin, Audit: AuditCoalesced},
		agentv1.EnrolmentService_Rekey_FullMethodName:      {Anonymous: true, Class: ClassJoin, Audit: AuditEach},

		taskv1.TaskService_CreateTasks_FullMethodName:    {Roles: clients, Class: ClassWrite, Audit: AuditEach},
		taskv1.TaskService_CancelTask_FullMethodName:     {Roles: clients, Class: ClassWrite, Audit: AuditEach},
		taskv1.TaskService_GetTask_FullMethodName:        {Roles: clients, Class: ClassRead, Audit: AuditCoalesced},
		taskv1.TaskService_ListTasks_FullMethodName:      {Roles: clients, Class: ClassRead, Audit: AuditCoalesced},
		taskv1.TaskService_ListTaskEvents_FullMethodName: {Roles: clients, Class: ClassRead, Audit: AuditCoalesced},
		taskv1.TaskService_WatchTasks_FullMethodName:     {Roles: clients, Class: ClassWatch, Audit: AuditCoalesced},
		taskv1.TaskService_ReadOutput_FullMethodName:     {Roles: clients, Class: ClassWatch, Audit: AuditCoalesced},

		nodev1.NodeService_GetNode_FullMethodName:         {Roles: clients, Class: ClassRead, Audit: AuditCoalesced},
		nodev1.NodeService_ListNodes_FullMethodName:       {Roles: clients, Class: ClassRead, Audit: AuditCoalesced},
		nodev1.NodeService_GetCluster_FullMethodName:      {Roles: clients, Class: ClassRead, Audit: AuditCoalesced},
		nodev1.NodeService_CreateJoinToken_FullMethodName: {Roles: operators, Class: ClassWrite, Audit: AuditEach},
		nodev1.NodeService_EvictNode_FullMethodName:       {Roles: operators, Class: ClassWrite, Audit: AuditEach},

		healthv1.HealthService_ListGpus_FullMethodName:          {Roles: clients, Class: ClassRead, Audit: AuditCoalesced},
		healthv1.HealthService_GetGpu_FullMethodName:            {Roles: clients, Class: ClassRead, Audit: AuditCoalesced},
		healthv1.HealthService_GetNodeHealth_FullMethodName:     {Roles: clients, Class: ClassRead, Audit: AuditCoalesced},
		healthv1.HealthService_ListHealthChanges_FullMethodName: {Roles: clients, Class: ClassRead, Audit: AuditCoalesced},
		healthv1.HealthService_WatchHealth_FullMethodName:       {Roles: clients, Class: ClassWatch, Audit: AuditCoalesced},

		healthgrpc.Health_Check_FullMethodName: {Roles: pki.Roles(), Class: ClassRead, Audit: AuditNone},
		healthgrpc.Health_List_FullMethodName:  {Roles: pki.Roles(), Class: ClassRead, Audit: AuditNone},
		healthgrpc.Health_Watch_FullMethodName: {Roles: pki.Roles(), Class: ClassWatch, Audit: AuditNone},
	}
}

// Allows reports whether a role may call the method; "" is the role of a caller
// without a certificate. A method without a row allows no one.
func (p Policy) Allows(method string, role pki.Role) bool {
	row, ok := p[method]
	if role == "" {
		return ok && row.Anonymous
	}
	return ok && slices.Contains(row.Roles, role)
}

// Covers returns an error that names the registered methods which have no row.
// A server calls it before it serves.
func (p Policy) Covers(services map[string]grpc.ServiceInfo) error {
	var missing []string
	for service, info := range services {
		for _, m := range info.Methods {
			method := "/" + service + "/" + m.Name
			if _, ok := p[method]; !ok {
				missing = append(missing, method)
			}
		}
	}
	if len(missing) == 0 {
		return nil
	}
	slices.Sort(missing)
	return fmt.Errorf("policy has no row for %s: every RPC needs one", strings.Join(missing, ", "))
}
