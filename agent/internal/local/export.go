package local

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// pieceBytes is about how much one message of an export holds.
const pieceBytes = 256 << 10

// ExportJournal implements agentv1.LocalServiceServer.
func (s *Server) ExportJournal(_ *agentv1.ExportJournalRequest, stream grpc.ServerStreamingServer[agentv1.ExportJournalResponse]) error {
	piece, size := new(agentv1.ExportJournalResponse), 0
	err := s.cfg.Node.Export(stream.Context(), func(line *agentv1.JournalLine) error {
		piece.Lines = append(piece.Lines, line)
		if size += proto.Size(line); size < pieceBytes {
			return stream.Context().Err()
		}
		full := piece
		piece, size = new(agentv1.ExportJournalResponse), 0
		return stream.Send(full)
	})
	if err == nil && len(piece.GetLines()) > 0 {
		err = stream.Send(piece)
	}
	if err != nil && stream.Context().Err() == nil {
		return refusal("export journal", err)
	}
	return err
}

// interceptStream lets only root call: what is exported holds all specs.
func (s *Server) interceptStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	who, ok := caller(stream.Context())
	switch {
	case !ok:
		return status.Error(codes.Unauthenticated, "the caller's credentials are not known")
	case who.UID != 0:
		return status.Errorf(codes.PermissionDenied, "only root may do this; you are uid %d", who.UID)
	}
	err := handler(srv, stream)
	if err != nil && status.Code(err) == codes.Internal {
		s.cfg.Logger.WarnContext(stream.Context(), "local call not answered", "method", info.FullMethod, "uid", who.UID, "err", err)
	}
	return err
}
