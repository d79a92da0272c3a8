# ucx::ucx: UCP with the UCS under it, always shared: UCX loads its transports by itself.
find_path(ucx_INCLUDE_DIR ucp/api/ucp.h)
find_library(ucx_ucp_LIBRARY ucp)
find_library(ucx_ucs_LIBRARY ucs)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(ucx REQUIRED_VARS ucx_ucp_LIBRARY ucx_ucs_LIBRARY ucx_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "Debian 12 has it as libucx-dev")
if(ucx_FOUND AND NOT TARGET ucx::ucx)
  add_library(ucx::ucx UNKNOWN IMPORTED)
  set_target_properties(ucx::ucx PROPERTIES IMPORTED_LOCATION "${ucx_ucp_LIBRARY}"
                                            INTERFACE_LINK_LIBRARIES "${ucx_ucs_LIBRARY}"
                                            INTERFACE_INCLUDE_DIRECTORIES "${ucx_INCLUDE_DIR}")
endif()
mark_as_advanced(ucx_INCLUDE_DIR ucx_ucp_LIBRARY ucx_ucs_LIBRARY)
